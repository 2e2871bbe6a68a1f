{{- define "convoymq.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}
{{- define "convoymq.selector" -}}
app.kubernetes.io/name: convoymq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "convoymq.labels" -}}
{{ include "convoymq.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "convoymq.secret" -}}
{{- .Values.existingSecret | default (include "convoymq.name" .) -}}
{{- end }}
{{- define "convoymq.ports" -}}
- {name: amqp, port: 5672, targetPort: amqp}
- {name: http, port: 15672, targetPort: http}
- {name: metrics, port: 15692, targetPort: metrics}
{{- end }}
