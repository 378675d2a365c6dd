"""What Rankscope costs, measured where it runs: `make bench`. Not tests: a missed target is shown, not a failure."""
