#!/usr/bin/env bash
# The wheels of the images, for their tests, in .image-wheels. Does nothing the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m tests.images.image_wheels
