{{/* One role with the rules of files/roles/<file>.yaml, bound to the operator. kind is ClusterRole or Role. */}}
{{- define "rankscope.operatorRole" -}}
{{- $name := printf "rankscope-%s" .file -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}
metadata:
  name: {{ $name }}
  {{- if eq .kind "Role" }}
  namespace: {{ .root.Release.Namespace }}
  {{- end }}
  labels:
    {{- include "rankscope.labels" (dict "root" .root "component" "operator") | nindent 4 }}
{{ .root.Files.Get (printf "files/roles/%s.yaml" .file) | required (printf "files/roles/%s.yaml is missing" .file) | trim }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ $name }}
  {{- if eq .kind "Role" }}
  namespace: {{ .root.Release.Namespace }}
  {{- end }}
  labels:
    {{- include "rankscope.labels" (dict "root" .root "component" "operator") | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "rankscope.fullname" .root }}-operator
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{/* A role for people, added to one of the cluster's own by aggregation. */}}
{{- define "rankscope.peoplesRole" -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: rankscope-{{ .file }}
  labels:
    {{- include "rankscope.labels" (dict "root" .root "component" "people") | nindent 4 }}
    rbac.authorization.k8s.io/aggregate-to-{{ .to }}: "true"
{{ .root.Files.Get (printf "files/roles/%s.yaml" .file) | required (printf "files/roles/%s.yaml is missing" .file) | trim }}
{{- end }}
