{{- define "neptrio.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "neptrio.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "neptrio.labels" -}}
{{ include "neptrio.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "neptrio.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "neptrio.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "neptrio.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- /* probes of a port by name, under a container */ -}}
{{- define "neptrio.probes" -}}
startupProbe:
  httpGet: {path: /v2/health/live, port: http}
  {{- toYaml .Values.probes.startup | nindent 2 }}
readinessProbe:
  httpGet: {path: /v2/health/ready, port: http}
  {{- toYaml .Values.probes.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /v2/health/live, port: http}
  {{- toYaml .Values.probes.liveness | nindent 2 }}
{{- end -}}

{{- /* the flags that decide how a pod ends; it must be given more time than these add up to */ -}}
{{- define "neptrio.shutdownArgs" -}}
- --exit-timeout-secs={{ .Values.shutdown.timeoutSeconds }}
- --exit-grace-secs={{ .Values.shutdown.graceSeconds }}
{{- end -}}
