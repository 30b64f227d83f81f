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
{{- $name := include "octavo.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%s is no name of a Service, which has no dot and begins with a letter: set fullnameOverride" $name) -}}
{{- end -}}
{{- if and (eq $v.modelCache.preload "job") (not (has $v.modelCache.type (list "pvc" "clone"))) -}}
{{- fail "modelCache.preload job fills a claim: modelCache.type must be pvc or clone" -}}
{{- end -}}
{{- if and (eq $v.modelCache.preload "init") $v.hub.offline -}}
{{- fail "modelCache.preload init downloads in the server's pod, which hub.offline keeps from the hub: use job" -}}
{{- end -}}
{{- range $resource := list "cpu" "memory" -}}
{{- $request := index $v.resources.requests $resource -}}
{{- $limit := index $v.resources.limits $resource -}}
{{- if and $limit (gt (include "octavo.units" $request | int64) (include "octavo.units" $limit | int64)) -}}
{{- fail (printf "resources.requests.%s is larger than resources.limits.%s" $resource $resource) -}}
{{- end -}}
{{- end -}}
{{- if and $v.otel.endpoint (gt (regexFind "[0-9]+$" $v.otel.endpoint | int) 65535) -}}
{{- fail "otel.endpoint: a port is at most 65535" -}}
{{- end -}}
{{- if and (not $v.gpu.enabled) (ne $v.gpu.resourceName "nvidia.com/gpu") -}}
{{- fail "gpu.resourceName needs gpu.enabled" -}}
{{- end -}}
{{- include "octavo.validateClaim" . -}}
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
{{- if and (hasPrefix "--" $word) (has $flag (list "config" "model" "host" "port" "shutdown-timeout" "api-key" "api-keys-file" "scheduling-policy" "min-priority" "max-step-ms" "share-prefix-cache" "hf-token")) -}}
{{- fail (printf "extraArgs: --%s is set by a value of its own" $flag) -}}
{{- end -}}
{{- end -}}
{{- range $flag := list "model" "host" "port" "shutdown-timeout" "device" "dtype" "api-key" "api-keys-file" "scheduling-policy" "min-priority" "max-step-ms" "share-prefix-cache" -}}
{{- if hasKey $v.config $flag -}}
{{- fail (printf "config.%s: this flag is set by a value of its own" $flag) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A quantity in bytes or units, rounded down; -1 for a suffix that is not among the usual ones. */}}
{{- define "octavo.amount" -}}
{{- $scale := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $suffix := regexFind "[a-zA-Z]*$" (toString .) -}}
{{- if hasKey $scale $suffix -}}
{{- mulf (trimSuffix $suffix (toString .) | float64) (get $scale $suffix) | int64 -}}
{{- else -}}
-1
{{- end -}}
{{- end }}

{{/* A quantity of a container in thousandths, so that 500m of a processor can be compared. */}}
{{- define "octavo.units" -}}
{{- if hasSuffix "m" (toString .) -}}
{{- trimSuffix "m" (toString .) -}}
{{- else -}}
{{- mul (include "octavo.amount" . | int64) 1000 -}}
{{- end -}}
{{- end }}

{{/* A whole number as it was written: those of a file arrive as floats. Nothing for an empty text. */}}
{{- define "octavo.whole" -}}
{{- if ne (toString .) "" -}}
{{- int64 . -}}
{{- end -}}
{{- end }}

{{/* How a claim of the chart's own is mounted: by each clone alone, or as modelCache.accessMode says. */}}
{{- define "octavo.accessMode" -}}
{{- eq .Values.modelCache.type "clone" | ternary "ReadWriteOnce" .Values.modelCache.accessMode -}}
{{- end }}

{{/* A claim that is there cannot shrink or change its class or access mode; the API server would refuse it in the middle of an
upgrade. */}}
{{- define "octavo.validateClaim" -}}
{{- $cache := .Values.modelCache -}}
{{- if and (has $cache.type (list "pvc" "clone")) (not $cache.existingClaim) -}}
{{- $name := include "octavo.claim" . -}}
{{- with lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name -}}
{{- $size := .spec.resources.requests.storage -}}
{{- if lt (include "octavo.amount" $cache.size | int64) (include "octavo.amount" $size | int64) -}}
{{- fail (printf "modelCache.size %s is smaller than the claim %s, which has %s and cannot shrink: keep it, or name another claim by modelCache.existingClaim" $cache.size $name $size) -}}
{{- end -}}
{{- if and $cache.storageClassName (ne $cache.storageClassName (.spec.storageClassName | default "")) -}}
{{- fail (printf "modelCache.storageClassName cannot change: the claim %s has the class %s" $name .spec.storageClassName) -}}
{{- end -}}
{{- $mode := include "octavo.accessMode" $ -}}
{{- if not (has $mode .spec.accessModes) -}}
{{- fail (printf "modelCache.type %s needs the access mode %s, and the claim %s has %s, which cannot change: name another claim by modelCache.existingClaim" $cache.type $mode $name (first .spec.accessModes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* How many replicas the Deployment has, for an autoscaler to go on from; nothing where there is no Deployment to look up.
Without the field a release that turns autoscaling on would fall to one replica, the default. */}}
{{- define "octavo.scaledReplicas" -}}
{{- with lookup "apps/v1" "Deployment" .Release.Namespace (include "octavo.fullname" .) -}}
{{- if hasKey .spec "replicas" -}}
{{- max (int .spec.replicas) (min 1 (int $.Values.autoscaling.minReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The labels and tolerations of the nodes that serve, which a Job needs too: it binds the claim to a zone. */}}
{{- define "octavo.placement" -}}
{{- $v := .Values -}}
{{- $labels := $v.gpu.enabled | ternary $v.gpu.nodeSelector dict -}}
{{- if and $v.gpu.enabled $v.gpu.sm70 -}}
{{- /* A T4 is 7.5. */ -}}
{{- $labels = merge dict $labels (dict "nvidia.com/gpu.compute.major" "7" "nvidia.com/gpu.compute.minor" "0") -}}
{{- end -}}
{{- with merge dict $v.nodeSelector $labels }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat ($v.gpu.enabled | ternary $v.gpu.tolerations list) $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
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
{{- with .Values.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . }}
{{- end }}
{{- end }}

{{/* The container that downloads the model, in a Job or before the server. */}}
{{- define "octavo.pullContainer" -}}
{{- $v := .Values -}}
name: pull
image: {{ include "octavo.image" . }}
imagePullPolicy: {{ $v.image.pullPolicy }}
args:
  - pull
  - $(OCTAVO_MODEL)
env:
  {{- include "octavo.modelEnv" . | nindent 2 }}
  {{- with $v.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  requests:
    cpu: 500m
    memory: 512Mi
    ephemeral-storage: 2Gi
  limits:
    memory: 1Gi
    {{- if $v.resources.limits.cpu }}
    cpu: "2"
    {{- end }}
    ephemeral-storage: 2Gi
securityContext:
  {{- toYaml $v.securityContext | nindent 2 }}
volumeMounts:
  - name: models
    mountPath: /models
  - name: tmp
    mountPath: /tmp
  {{- with $v.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
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
