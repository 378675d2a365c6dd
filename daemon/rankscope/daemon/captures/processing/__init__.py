"""From recordings to artifacts, in a confined process."""
