# docker buildx bake -f deploy/docker/bake.hcl, with VERSION from pyproject.toml: `make images` does that. See README.md.

variable "VERSION" {
  validation {
    condition     = VERSION != ""
    error_message = "VERSION is empty: use `make images`, or set it to the version in pyproject.toml."
  }
}

variable "REVISION" {
  default = ""
}

# With a slash at its end: "registry.example/team/".
variable "REGISTRY" {
  default = ""
}

group "default" {
  targets = ["daemon", "daemon-s3", "operator", "probe"]
}

target "image" {
  name = component
  matrix = {
    component = ["daemon", "daemon-s3", "operator", "probe"]
  }
  context    = "."
  dockerfile = "deploy/docker/Dockerfile"
  target     = component
  platforms  = ["linux/amd64", "linux/arm64"]
  args = {
    VERSION  = VERSION
    REVISION = REVISION
  }
  tags   = ["${REGISTRY}rankscope-${component}:${VERSION}"]
  attest = ["type=sbom", "type=provenance,mode=max"]
}
