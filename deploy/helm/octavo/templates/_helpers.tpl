{{- define "octavo.fullname" -}}
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
{{- end }}

{{/* What selects the server's pods, and nothing else's. */}}
{{- define "octavo.selector" -}}
app: {{ include "octavo.fullname" . }}
{{- end }}

{{- define "octavo.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "octavo.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end }}

{{/* The name that responses and metrics carry. */}}
{{- define "octavo.servedName" -}}
{{- $served := index .Values.config "served-model-name" -}}
{{- if kindIs "slice" $served -}}
{{- first $served -}}
{{- else -}}
{{- default .Values.model $served -}}
{{- end -}}
{{- end }}

{{/* The claim with the models; the chart's own unless one is there. */}}
{{- define "octavo.claim" -}}
{{- default (printf "%s-models" (include "octavo.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end }}

{{/* The InferencePool: the release of its chart, so no name of ours; and what that chart calls its picker. */}}
{{- define "octavo.pool" -}}
{{- printf "%s-pool" (include "octavo.fullname" . | trunc 48 | trimSuffix "-") -}}
{{- end }}

{{- define "octavo.picker" -}}
{{- printf "%s-epp" (include "octavo.pool" . | trunc 40) -}}
{{- end }}

{{/* Disk of the node: the cache, if it lies there, and 4Gi for the other volumes, the log and what the runtime writes. */}}
{{- define "octavo.disk" -}}
{{- $given := index .Values.resources.requests "ephemeral-storage" -}}
{{- $size := .Values.modelCache.size -}}
{{- if $given -}}
{{- $given -}}
{{- else if ne .Values.modelCache.type "emptyDir" -}}
4Gi
{{- else if regexMatch "^[0-9]+Gi$" $size -}}
{{- printf "%dGi" (add (trimSuffix "Gi" $size) 4) -}}
{{- else if regexMatch "^[0-9]+Ti$" $size -}}
{{- printf "%dGi" (add (mul (trimSuffix "Ti" $size) 1024) 4) -}}
{{- else -}}
{{- fail "modelCache.size of an emptyDir is whole Gi or Ti, or resources.requests.ephemeral-storage says what the pod needs" -}}
{{- end -}}
{{- end }}

{{/* What no schema can say: values that contradict each other. */}}
{{- define "octavo.validate" -}}
{{- $v := .Values -}}
{{- if gt (int $v.requestTimeoutSeconds) (int $v.shutdown.timeoutSeconds) -}}
{{- fail "requestTimeoutSeconds is longer than shutdown.timeoutSeconds: a rollout would cut requests that a proxy lets run" -}}
{{- end -}}
{{- if and $v.modelCache.preload (not (has $v.modelCache.type (list "pvc" "clone"))) -}}
{{- fail "modelCache.preload fills a claim: modelCache.type must be pvc or clone" -}}
{{- end -}}
{{- if and (eq $v.modelCache.type "pvc") (eq $v.modelCache.accessMode "ReadWriteOnce") -}}
{{- if or (gt (int $v.replicas) 1) (ne $v.autoscaling.type "none") (ne $v.strategy.type "recreate") -}}
{{- fail "a ReadWriteOnce cache is mounted by one node: use replicas 1, no autoscaling and strategy.type recreate, or modelCache.type clone" -}}
{{- end -}}
{{- end -}}
{{- if and $v.ingress.tlsSecret (not $v.ingress.host) -}}
{{- fail "ingress.tlsSecret needs ingress.host" -}}
{{- end -}}
{{- if and $v.gateway.tlsSecret (not $v.gateway.host) -}}
{{- fail "gateway.tlsSecret needs gateway.host" -}}
{{- end -}}
{{- if and $v.gateway.inferencePool (not $v.gateway.enabled) -}}
{{- fail "gateway.inferencePool needs gateway.enabled" -}}
{{- end -}}
{{- if and $v.podTls.secret $v.gateway.inferencePool -}}
{{- fail "podTls.secret and gateway.inferencePool exclude each other: a BackendTLSPolicy is for Services" -}}
{{- end -}}
{{- if and $v.kvEvents.enabled (not $v.gateway.inferencePool) -}}
{{- fail "kvEvents.enabled needs gateway.inferencePool, whose endpoint picker follows the events" -}}
{{- end -}}
{{- if and (eq $v.spread.nodes "require") (eq $v.strategy.type "surge") -}}
{{- fail "spread.nodes require and strategy.type surge exclude each other: a new pod would wait for a node that an old one has" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas is larger than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.type "hpa") (lt (int $v.autoscaling.minReplicas) 1) -}}
{{- fail "autoscaling.type hpa cannot scale to zero: autoscaling.minReplicas must be at least 1" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.type "keda") (lt (int $v.autoscaling.minReplicas) 1) (not $v.ingress.enabled) -}}
{{- fail "with no replica only the ingress controller can count requests: autoscaling.minReplicas 0 needs ingress.enabled" -}}
{{- end -}}
{{- if and (ne $v.autoscaling.type "none") (eq $v.metrics.monitor "none") -}}
{{- fail "autoscaling.type needs metrics.monitor: without a monitor Prometheus has no metrics to scale by" -}}
{{- end -}}
{{- range $variable := $v.extraEnv -}}
{{- $flag := $variable.name | trimPrefix "OCTAVO_" | lower | replace "_" "-" -}}
{{- if and (hasPrefix "OCTAVO_" $variable.name) (hasKey $v.config $flag) -}}
{{- fail (printf "extraEnv.%s is ignored: config.%s wins" $variable.name $flag) -}}
{{- end -}}
{{- end -}}
{{- range $word := $v.extraArgs -}}
{{- $flag := regexReplaceAll "=.*" $word "" | trimPrefix "--" | replace "_" "-" -}}
{{- if and (hasPrefix "--" $word) (has $flag (list "config" "model" "host" "port" "shutdown-timeout" "api-key" "hf-token")) -}}
{{- fail (printf "extraArgs: --%s is set by a value of its own" $flag) -}}
{{- end -}}
{{- end -}}
{{- range $flag := list "model" "host" "port" "shutdown-timeout" "device" "dtype" "api-key" -}}
{{- if hasKey $v.config $flag -}}
{{- fail (printf "config.%s: this flag is set by a value of its own" $flag) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Environment of whatever loads or downloads a model. */}}
{{- define "octavo.modelEnv" -}}
- name: OCTAVO_MODEL
  valueFrom:
    configMapKeyRef:
      name: {{ include "octavo.fullname" . }}-config
      key: model
- name: HF_HOME
  value: /models
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.hub.tokenSecret }}
      key: {{ .Values.hub.tokenKey }}
      optional: true
{{- end }}

{{/* Security of a pod, as the policy `restricted` asks; 42420 is the image's user. */}}
{{- define "octavo.podSecurity" -}}
runAsNonRoot: true
runAsUser: 42420
runAsGroup: 42420
fsGroup: 42420
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "octavo.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{/* Ways out that names and downloads need; .hub says whether to the hub as well. */}}
{{- define "octavo.egress" -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
    - ipBlock:
        cidr: 169.254.20.10/32
  ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- if .hub }}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except:
          - 10.0.0.0/8
          - 100.64.0.0/10
          - 169.254.0.0/16
          - 172.16.0.0/12
          - 192.168.0.0/16
    - ipBlock:
        cidr: ::/0
        except:
          - fc00::/7
          - fe80::/10
  ports:
    - port: 443
      protocol: TCP
{{- end }}
{{- end }}
