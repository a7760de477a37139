{{- define "skyserve.labels" -}}
app.kubernetes.io/name: skyserve-controller
app.kubernetes.io/part-of: skyserve
{{- end }}

{{- define "skyserve.selector" -}}
app.kubernetes.io/name: skyserve-controller
{{- end }}

{{- define "skyserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* config.yaml: what the manifests rely on, then the user's. */}}
{{- define "skyserve.config" -}}
{{- $listen := dict "host" "0.0.0.0" "port" 9443 "certfile" "/run/skyserve/tls/tls.crt" "keyfile" "/run/skyserve/tls/tls.key" -}}
{{- $own := dict "controller" (dict "listen" $listen "metrics_port" 9464 "metrics_host" "0.0.0.0") -}}
{{- $_ := set $own "load_balancer" (dict "host" "0.0.0.0" "first_port" 30001 "last_port" 30050) -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.config)) -}}
{{- end }}
