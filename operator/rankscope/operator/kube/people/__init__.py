"""The API for people: gRPC with a Kubernetes token, and RBAC on captures for what they may do."""
