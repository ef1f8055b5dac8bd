"""`python -m specpilot_rs.cli`."""

from specpilot_rs.cli import main

main()
