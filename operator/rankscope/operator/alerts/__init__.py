"""From a firing alert to a capture of the ranks it is about. Free of Kubernetes: a laptop runs it too.

Whoever reaches the endpoint can only ask for captures that the rules of this package allow: of jobs and ranks that the
correlation knows, once per alert, and no more often than the limits say."""
