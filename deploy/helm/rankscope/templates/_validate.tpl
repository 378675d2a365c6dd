{{/* What the schema cannot say, in words that tell what to do. */}}
{{- define "rankscope.validate" -}}
{{- $daemon := .Values.daemon }}
{{- $wrong := list }}
{{- if not (or $daemon.enabled .Values.operator.enabled) }}
{{- $wrong = append $wrong "daemon.enabled and operator.enabled are both false: nothing is left to install. Next step: set one of them to true" }}
{{- end }}
{{- if not .Values.operator.enabled }}
{{- if .Values.alerts.enabled }}
{{- $wrong = append $wrong "alerts.enabled is true, but the operator, which receives alerts, is off. Next step: set operator.enabled=true or alerts.enabled=false" }}
{{- end }}
{{- if .Values.metrics.serviceMonitor.enabled }}
{{- $wrong = append $wrong "metrics.serviceMonitor.enabled is true, but the operator is off. Next step: set operator.enabled=true, or metrics.serviceMonitor.enabled=false (daemons are scraped by metrics.podMonitor)" }}
{{- end }}
{{- end }}
{{- $console := .Values.operator.console }}
{{- if and $console.enabled (not .Values.api.enabled) }}
{{- $wrong = append $wrong "operator.console.enabled is true, but api.enabled, whose tokens the console takes, is false. Next step: set api.enabled=true or operator.console.enabled=false" }}
{{- end }}
{{- if ne (empty $console.proxy.name) (empty $console.proxy.authorityConfigMap) }}
{{- $wrong = append $wrong "operator.console.proxy has a name or an authorityConfigMap, and a proxy is known by both. Next step: set both or none" }}
{{- end }}
{{- if has (int $console.port) (list 9443 9466 9467 9468) }}
{{- $wrong = append $wrong (printf "operator.console.port is %d, which is another listener's of the operator. Next step: set another port" (int $console.port)) }}
{{- end }}
{{- if and .Values.metrics.tls (not (include "rankscope.daemonListens" .)) $daemon.enabled }}
{{- $wrong = append $wrong "metrics.tls needs certificates, and without the operator nobody makes them. Next step: set operator.enabled=true, or tls.mode=certManager or existing" }}
{{- end }}
{{- if and .Values.metrics.podMonitor.enabled (not $daemon.enabled) }}
{{- $wrong = append $wrong "metrics.podMonitor.enabled is true, but the daemons are off. Next step: set daemon.enabled=true or metrics.podMonitor.enabled=false" }}
{{- end }}
{{- if gt (int $daemon.dutyCycle.steps) 0 }}
{{- if not $daemon.captures.enabled }}
{{- $wrong = append $wrong "daemon.dutyCycle.steps records steps by captures, and daemon.captures.enabled is false. Next step: set daemon.captures.enabled=true or daemon.dutyCycle.steps=0" }}
{{- else if not (or $daemon.namespaceEntry $daemon.kinetoSocketDir) }}
{{- $wrong = append $wrong "daemon.dutyCycle.steps needs captures of level 1, which cannot reach any pod: daemon.namespaceEntry is false and daemon.kinetoSocketDir is empty. Next step: set one of them, or daemon.dutyCycle.steps=0" }}
{{- end }}
{{- end }}
{{- if not $daemon.captures.enabled }}
{{- if $daemon.captures.uploadUrl }}
{{- $wrong = append $wrong "daemon.captures.uploadUrl is set, but daemon.captures.enabled is false: there is nothing to upload. Next step: set daemon.captures.enabled=true or leave the URL out" }}
{{- end }}
{{- if $daemon.kinetoSocketDir }}
{{- $wrong = append $wrong "daemon.kinetoSocketDir is for captures, and daemon.captures.enabled is false. Next step: set daemon.captures.enabled=true or leave the directory out" }}
{{- end }}
{{- end }}
{{- $report := .Values.captureReport }}
{{- if and $report.enabled (or (empty $report.capturesClaim) (empty $report.reportsClaim)) }}
{{- $wrong = append $wrong "captureReport.enabled is true, and a claim is missing: workers read captures from one volume and write reports to another. Next step: set captureReport.capturesClaim and captureReport.reportsClaim" }}
{{- end }}
{{- $fleet := .Values.fleetReport }}
{{- if and $fleet.enabled (or (empty $fleet.prometheusUrl) (empty $fleet.uploadUrl)) }}
{{- $wrong = append $wrong "fleetReport.enabled is true, and a URL is missing: the report is made from Prometheus and put into a store. Next step: set fleetReport.prometheusUrl and fleetReport.uploadUrl" }}
{{- end }}
{{- $push := $daemon.profilePush }}
{{- if and (or $push.tenant $push.secretName $push.authorityConfigMap) (not $push.url) }}
{{- $wrong = append $wrong "daemon.profilePush has no url, so nothing is pushed. Next step: set daemon.profilePush.url or leave the other values out" }}
{{- end }}
{{- if and $push.url (not $daemon.profiles.enabled) }}
{{- $wrong = append $wrong "daemon.profilePush.url is set, but daemon.profiles.enabled is false, so there are no profiles to push. Next step: set daemon.profiles.enabled=true or leave the URL out" }}
{{- end }}
{{- if and (hasPrefix "http://" $push.url) (or $push.secretName $push.authorityConfigMap) }}
{{- $wrong = append $wrong "daemon.profilePush.secretName and authorityConfigMap need TLS, and daemon.profilePush.url is http. Next step: set an https URL or leave them out" }}
{{- end }}
{{- if and $daemon.gpu.dcgmUrl (not $daemon.gpu.enabled) }}
{{- $wrong = append $wrong "daemon.gpu.dcgmUrl is set, but daemon.gpu.enabled is false. Next step: set daemon.gpu.enabled=true or leave the URL out" }}
{{- end }}
{{- if and .Values.priorityClass.create $daemon.priorityClassName }}
{{- $wrong = append $wrong "daemon.priorityClassName names a class, and priorityClass.create makes another. Next step: set priorityClass.create=false or leave the name out" }}
{{- end }}
{{- if le (trimSuffix "h" .Values.tls.certManager.duration | int) (trimSuffix "h" .Values.tls.certManager.renewBefore | int) }}
{{- $wrong = append $wrong (printf "tls.certManager.renewBefore (%s) is not shorter than duration (%s): certificates would be renewed without end. Next step: set it to a third of the duration" .Values.tls.certManager.renewBefore .Values.tls.certManager.duration) }}
{{- end }}
{{- if and (ne .Values.tls.mode "certManager") .Values.tls.certManager.issuerRef.name }}
{{- $wrong = append $wrong (printf "tls.certManager.issuerRef names an issuer, but tls.mode is %s. Next step: set tls.mode=certManager or leave the issuer out" .Values.tls.mode) }}
{{- end }}
{{- if $wrong }}
{{- fail (printf "\n\nThese values do not go together:\n- %s\n" (join "\n- " $wrong)) }}
{{- end }}
{{- end }}
