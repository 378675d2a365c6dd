"""From a firing alert to a capture of its ranks. Works without Kubernetes.

A caller of the endpoint can only request captures that the rules of this package allow: of jobs and ranks that the
correlation knows, once per alert, and within the limits."""
