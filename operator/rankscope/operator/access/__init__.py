"""The gRPC API for users: Kubernetes tokens, RBAC, limits."""
