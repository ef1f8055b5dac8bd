//! What is written and what is refused.
