"""The command line: one file per subcommand. It composes the daemon and the operator; logic belongs to them."""
