"""The daemon's network side: gRPC, HTTP, certificates, policies of the operator."""
