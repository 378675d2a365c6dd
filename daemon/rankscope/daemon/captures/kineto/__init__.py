"""Captures by libkineto: its datagram protocol, its sockets, its configuration."""
