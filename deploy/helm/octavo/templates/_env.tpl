{{/* Environment of the server. A variable that is there twice is refused: Helm 4 would fail at the API server, Helm 3 would not. */}}
{{- define "octavo.serverVariables" -}}
{{- $v := .Values -}}
{{- $name := include "octavo.fullname" . -}}
{{ include "octavo.modelEnv" . }}
{{- if $v.gateway.enabled }}
# Envoy keeps an idle connection for an hour. Closed by the server before that, a request on its way is answered 503.
- name: VLLM_HTTP_TIMEOUT_KEEP_ALIVE
  value: "3900"
{{- end }}
{{- if $v.hub.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if $v.apiKey.secret }}
- name: OCTAVO_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $v.apiKey.secret }}
      key: {{ $v.apiKey.key }}
{{- end }}
{{- if $v.apiKeysFile.secret }}
- name: OCTAVO_API_KEYS_FILE
  value: /etc/octavo-keys/{{ $v.apiKeysFile.key }}
{{- end }}
{{- with $v.scheduling.policy }}
- name: OCTAVO_SCHEDULING_POLICY
  value: {{ . }}
{{- end }}
{{- with include "octavo.whole" $v.scheduling.minPriority }}
- name: OCTAVO_MIN_PRIORITY
  value: {{ . | quote }}
{{- end }}
{{- with include "octavo.whole" $v.scheduling.maxStepMs }}
- name: OCTAVO_MAX_STEP_MS
  value: {{ . | quote }}
{{- end }}
{{- if $v.scheduling.sharePrefixCache }}
- name: OCTAVO_SHARE_PREFIX_CACHE
  value: "true"
{{- end }}
# A pod that cannot use its GPU fails, instead of serving slowly from the processor.
- name: OCTAVO_DEVICE
  value: {{ $v.gpu.enabled | ternary "cuda" "cpu" }}
{{- if not $v.gpu.enabled }}
- name: OCTAVO_CPU_THREADS
  valueFrom:
    resourceFieldRef:
      resource: requests.cpu
{{- else if $v.gpu.sm70 }}
- name: OCTAVO_DTYPE
  value: half
{{- end }}
{{- with $v.otel.endpoint }}
- name: OCTAVO_LOG_FORMAT
  value: json
- name: OTEL_SERVICE_NAME
  value: {{ $name }}
- name: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
  value: {{ . }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $v.otel.ratio | quote }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)
{{- end }}
{{- if $v.podTls.secret }}
- name: OCTAVO_SSL_CERTFILE
  value: /etc/octavo-tls/tls.crt
- name: OCTAVO_SSL_KEYFILE
  value: /etc/octavo-tls/tls.key
- name: OCTAVO_ENABLE_SSL_REFRESH
  value: "true"
{{- end }}
{{- if $v.kvEvents.enabled }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: OCTAVO_KV_EVENTS_CONFIG
  value: >-
    {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558",
    "topic": "kv@$(POD_IP):8000@{{ include "octavo.servedName" . }}"}
- name: PYTHONHASHSEED
  value: {{ $v.kvEvents.hashSeed | quote }}
{{- end }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "octavo.serverEnv" -}}
{{- $text := include "octavo.serverVariables" . -}}
{{- $seen := dict -}}
{{- range fromYamlArray $text -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "extraEnv repeats %s, which the chart or an earlier entry sets" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- $text -}}
{{- end }}
