{{/* The names of everything. */}}
{{- define "alignedserve.name" -}}
{{- if contains "alignedserve" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-alignedserve" (.Release.Name | trunc 27 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "alignedserve.selector" -}}
app.kubernetes.io/name: alignedserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "alignedserve.labels" -}}
{{ include "alignedserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "alignedserve.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" (ternary "cuda" "cpu" (gt (int .Values.gpus) 0)) .Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{/* Of the head's volume, or of the volume of all pods. */}}
{{- define "alignedserve.claim" -}}
{{- .Values.persistence.existingClaim | default (printf "%s-state" (include "alignedserve.name" .)) -}}
{{- end -}}

{{/* What would be installed and not do what was asked is refused. */}}
{{- define "alignedserve.checked" -}}
{{- $gateway := .Values.config.gateway | default dict -}}
{{- range $name, $instead := dict "host" "mode" "port" "port" "drain_s" "drainSeconds" "keys_file" "auth.keysFile" "tls_certificate" "tls.secret" "tls_key" "tls.secret" -}}
{{- if hasKey $gateway $name -}}{{- fail (printf "config.gateway.%s is set by the chart: use %s" $name $instead) -}}{{- end -}}
{{- end -}}
{{- $pods := ternary (add 1 (int .Values.ray.workers)) 1 (eq .Values.mode "ray") -}}
{{- with $gateway.count -}}
{{- if lt (int .) (int $pods) -}}{{- fail "config.gateway.count: a pod without a gateway is never ready; leave it out, and each has one" -}}{{- end -}}
{{- if and (gt (int .) (int $pods)) (not $gateway.shared_port) -}}{{- fail "config.gateway.count: the service knows one port of a pod; set config.gateway.shared_port=true as well" -}}{{- end -}}
{{- end -}}
{{- if dig "model" "path" "" .Values.config -}}{{- fail "config.model.path is set by the chart: use model" -}}{{- end -}}
{{- if and .Values.auth.keysFile.secret .Values.auth.apiKeys.secret -}}
{{- fail "auth.keysFile.secret and auth.apiKeys.secret: name one of the two" -}}
{{- end -}}
{{- if not (or .Values.auth.keysFile.secret .Values.auth.apiKeys.secret .Values.auth.allowAnonymous) -}}
{{- fail "name a secret with keys (auth.keysFile.secret or auth.apiKeys.secret); auth.allowAnonymous=true lets anyone in who reaches the port" -}}
{{- end -}}
{{- if eq .Values.mode "ray" -}}
{{- if not .Values.ray.tokenSecret.name -}}{{- fail "mode ray needs ray.tokenSecret.name: whoever reaches Ray's ports could run code otherwise" -}}{{- end -}}
{{- if .Values.inferencePool.enabled -}}{{- fail "inferencePool is for mode pods: the gateways of a cluster share its work, so there is nothing to pick" -}}{{- end -}}
{{- if or (ne (int .Values.replicas) 1) .Values.autoscaling.enabled -}}{{- fail "replicas and autoscaling are for mode pods; in mode ray it is ray.workers" -}}{{- end -}}
{{- if .Values.persistence.shared -}}{{- fail "persistence.shared is for mode pods; the head of a cluster serves files and batches to its workers" -}}{{- end -}}
{{- else if or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled -}}
{{- if and (dig "batches" "enabled" true .Values.config) (not .Values.persistence.shared) -}}{{- fail "with several replicas a file that one pod has is unknown to the others: share it (redis.secret and persistence.shared), set config.batches.enabled=false, or use mode ray" -}}{{- end -}}
{{- if and .Values.persistence.existingClaim (not .Values.persistence.shared) -}}{{- fail "persistence.existingClaim is for one pod: with several replicas set persistence.shared=true, and redis.secret" -}}{{- end -}}
{{- end -}}
{{- if and .Values.persistence.shared (not (and .Values.redis.secret .Values.persistence.enabled)) -}}{{- fail "persistence.shared needs redis.secret and persistence.enabled: one pod alone can open the file of records" -}}{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}{{- end -}}
{{- if and .enabled (not (or .waiting .running .late)) -}}{{- fail "autoscaling: one of waiting, running and late must be above 0" -}}{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}{{- fail "httpRoute.parentRefs: name the Gateway" -}}{{- end -}}
{{- if and .Values.ingress.enabled .Values.inferencePool.enabled -}}{{- fail "ingress: its requests would pass the endpoint picker by; use httpRoute" -}}{{- end -}}
{{- $hasKeys := or .Values.auth.keysFile.secret .Values.auth.apiKeys.secret -}}
{{- if and $hasKeys .Values.inferencePool.enabled -}}{{- fail "inferencePool: the endpoint picker sends no key to /metrics; set auth.allowAnonymous=true without keys, and let networkPolicy.clients name the gateway and the picker" -}}{{- end -}}
{{- if and $hasKeys .Values.serviceMonitor.enabled (not .Values.serviceMonitor.apiKey.secret) -}}{{- fail "serviceMonitor.apiKey.secret: Prometheus needs a key for /metrics" -}}{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}{{- fail "inferencePool.endpointPicker.name: the service of the endpoint picker" -}}{{- end -}}
{{- end -}}

{{/* AlignedServe's configuration: the user's, and what follows from other values. */}}
{{- define "alignedserve.settings" -}}
{{- $gateway := dict "host" (ternary "node" "0.0.0.0" (eq .Values.mode "ray")) "port" .Values.port "drain_s" .Values.drainSeconds -}}
{{- if .Values.auth.keysFile.secret -}}{{- $_ := set $gateway "keys_file" (printf "/etc/alignedserve/keys/%s" .Values.auth.keysFile.key) -}}{{- end -}}
{{- if .Values.tls.secret -}}
{{- $_ := set $gateway "tls_certificate" "/etc/alignedserve/tls/tls.crt" -}}
{{- $_ := set $gateway "tls_key" "/etc/alignedserve/tls/tls.key" -}}
{{- end -}}
{{- $ours := dict "gateway" $gateway -}}
{{- if gt (int .Values.gpus) 0 -}}{{- $_ := set $ours "engine" (dict "device" (dig "engine" "device" "cuda" .Values.config)) -}}{{- end -}}
{{- mergeOverwrite (deepCopy .Values.config) $ours | toYaml -}}
{{- end -}}

{{/* Parts of pods, the same in both modes. */}}
{{- define "alignedserve.pod" -}}
serviceAccountName: {{ include "alignedserve.name" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (int .Values.drainSeconds) (int .Values.endingSeconds) 5 }}
securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    # Folders of the state are closed to others, and stay so: the group is set once, when the volume is new.
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
        type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "alignedserve.container" -}}
image: {{ include "alignedserve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
        drop: [ALL]
{{- $resources := deepCopy .Values.resources }}
{{- if gt (int .Values.gpus) 0 }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" .Values.gpus)) }}
{{- end }}
resources: {{- toYaml $resources | nindent 4 }}
{{- end -}}

{{- define "alignedserve.environment" -}}
# Folders that only their user can enter: a volume itself is open to its group.
- name: ALIGNEDSERVE_RUN_DIR
  value: /run/alignedserve/own
- name: ALIGNEDSERVE_STATE_DIR
  value: /var/lib/alignedserve/state
- name: HF_HOME
  value: /var/lib/alignedserve/huggingface
{{- with .Values.auth.apiKeys }}
{{- if .secret }}
- name: SECRET_API_KEYS
  valueFrom:
      secretKeyRef:
          name: {{ .secret }}
          key: {{ .key }}
# The comma: a secret that is empty is a mistake then, and would let anyone in without it.
- name: ALIGNEDSERVE_API_KEYS
  value: ",$(SECRET_API_KEYS)"
{{- end }}
{{- end }}
{{- with .Values.redis }}
{{- if .secret }}
- name: ALIGNEDSERVE_REDIS_URL
  valueFrom:
      secretKeyRef:
          name: {{ .secret }}
          key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "alignedserve.mounts" -}}
- name: shared-memory
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
- name: run
  mountPath: /run/alignedserve
- name: home
  mountPath: /home/alignedserve
- name: settings
  mountPath: /etc/alignedserve/settings
  readOnly: true
{{- if .Values.auth.keysFile.secret }}
- name: keys
  mountPath: /etc/alignedserve/keys
  readOnly: true
{{- end }}
{{- if .Values.tls.secret }}
- name: tls
  mountPath: /etc/alignedserve/tls
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "alignedserve.volumes" -}}
- name: shared-memory
  emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
- name: tmp
  emptyDir: {}
- name: run
  emptyDir: {}
- name: home
  emptyDir: {}
- name: settings
  configMap:
      name: {{ include "alignedserve.name" . }}
{{- with .Values.auth.keysFile }}
{{- if .secret }}
- name: keys
  secret:
      secretName: {{ .secret }}
      defaultMode: 0440
      items: [{ key: {{ .key }}, path: {{ .key }} }]
{{- end }}
{{- end }}
{{- with .Values.tls.secret }}
- name: tls
  secret:
      secretName: {{ . }}
      defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "alignedserve.readiness" -}}
readinessProbe:
    httpGet: { path: /ready, port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .Values.tls.secret "") }} }
    periodSeconds: 5
    failureThreshold: 2
    timeoutSeconds: 3
{{- end -}}
