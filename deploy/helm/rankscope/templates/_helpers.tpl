{{/* Names do not depend on the release: one Rankscope per cluster, because its kinds and webhooks are cluster-wide. A second
release fails on them. The operator refers to Secrets and roles by name, so these two are not renamed. */}}
{{- define "rankscope.name" -}}
{{ .Values.nameOverride | default "rankscope" }}
{{- end }}

{{- define "rankscope.fullname" -}}
{{ .Values.fullnameOverride | default (include "rankscope.name" .) }}
{{- end }}

{{- define "rankscope.selector" -}}
app.kubernetes.io/name: {{ include "rankscope.name" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Ours win over those that values add (commonLabels, .more): selectors rely on them. */}}
{{- define "rankscope.labels" -}}
{{- $ours := dict
  "app.kubernetes.io/name" (include "rankscope.name" .root)
  "app.kubernetes.io/component" .component
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/part-of" "rankscope"
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_")
-}}
{{- toYaml (merge $ours (default dict .more) .root.Values.commonLabels) }}
{{- end }}

{{- define "rankscope.image" -}}
{{- $name := printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) .image.repository | trimPrefix "/" -}}
{{- if .image.digest -}}
{{ $name }}@{{ .image.digest }}
{{- else -}}
{{ $name }}:{{ .image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "rankscope.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Whether daemons listen for an operator: ours, or one elsewhere that has certificates of the same authority. */}}
{{- define "rankscope.daemonListens" -}}
{{- if or .Values.operator.enabled (ne .Values.tls.mode "operator") }}true{{ end -}}
{{- end }}

{{/* Whether the operator shows a certificate to callers from outside: people, Alertmanager, Prometheus. */}}
{{- define "rankscope.operatorServesTls" -}}
{{- if or .Values.api.enabled .Values.alerts.enabled .Values.metrics.tls }}true{{ end -}}
{{- end }}
