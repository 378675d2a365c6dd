"""The probe: runs inside the training process, so it is standard library only, runs on Python 3.9, and must never break,
slow or change the user's program. It writes records into a sealed memfd ring; it reads nothing from anyone and imports
nothing else of ours."""
