"""The Kubernetes API: client, watch cache, leases, writer, our own kinds."""
