"""Benchmarks: what speculation gains on given prompts.

`acceptance` decodes prompt sets with every configuration and compares the tokens with plain decoding's;
`rounds` counts what each pass drafted, accepted and could have accepted; `resampling` says how sure the
figures are; `report` puts them into one mapping, `table` and `plot` show it. `command` is `specpilot bench`.
"""
