"""What daemon, operator and CLI share: HTTP server, TLS, audit records, rank selection. Standard library only."""
