{{/* Short enough for what is put behind it, also by Kubernetes */}}
{{- define "jaxserve.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels by which this release's pods are found */}}
{{- define "jaxserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jaxserve.labels" -}}
{{ include "jaxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels of the pods that serve HTTP and have devices behind them: of a replica over several hosts, the leader */}}
{{- define "jaxserve.replicaSelector" -}}
{{ include "jaxserve.selector" . }}
app.kubernetes.io/component: replica
{{- if gt (int .Values.hosts) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{/* What contradicts itself */}}
{{- define "jaxserve.check" -}}
{{- if not (or .Values.apiKeysSecret .Values.insecure) }}
{{- fail "apiKeysSecret: name a Secret, or set insecure: true to serve everybody who can connect" }}
{{- end }}
{{- if and (gt (int .Values.hosts) 1) (not .Values.groupSecret) }}
{{- fail "groupSecret: needed with hosts above 1" }}
{{- end }}
{{- if .Values.conductor.enabled }}
{{- if .Values.autoscaling.enabled }}{{ fail "autoscaling.enabled: not with a conductor, which is told its replicas" }}{{ end }}
{{- if not .Values.groupSecret }}{{ fail "groupSecret: needed with a conductor" }}{{ end }}
{{- if not (or .Values.tlsSecret .Values.insecure) }}
{{- fail "tlsSecret: needed with a conductor, or insecure: true for plain text between it and the replicas" }}
{{- end }}
{{- if not (or .Values.replicas (and .Values.conductor.prefill .Values.conductor.decode)) }}
{{- fail "replicas: is 0: requests need replicas that prefill and that decode" }}
{{- end }}
{{- else if or .Values.conductor.prefill .Values.conductor.decode }}
{{- fail "conductor.enabled: roles need a conductor" }}
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.apiKeysSecret (not .Values.podMonitor.keySecret.name) }}
{{- fail "podMonitor.keySecret: /metrics asks for an API key" }}
{{- end }}
{{- if .Values.inferencePool.enabled }}
{{- if .Values.conductor.enabled }}{{ fail "inferencePool.enabled: not with a conductor, which picks replicas itself" }}{{ end }}
{{- if or .Values.apiKeysSecret .Values.tlsSecret (not .Values.insecure) }}
{{- fail "inferencePool.enabled: endpoint pickers send no keys: set apiKeysSecret and tlsSecret to \"\", and insecure: true" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Replicas by role, as JSON: {"": 2, "prefill": 1} */}}
{{- define "jaxserve.roles" -}}
{{- $roles := dict }}
{{- if or .Values.replicas (not .Values.conductor.enabled) }}{{ $_ := set $roles "" .Values.replicas }}{{ end }}
{{- range $role := list "prefill" "decode" }}
{{- with index $.Values.conductor $role }}{{ $_ := set $roles $role . }}{{ end }}
{{- end }}
{{- toJson $roles }}
{{- end }}

{{/* The name of a role's set of pods; with several hosts it is no Service's of the chart: the controller makes one of this name, by
which hosts find their leader, and others the leaders. Takes root, role. */}}
{{- define "jaxserve.setName" -}}
{{- $role := .role }}
{{- if gt (int .root.Values.hosts) 1 }}{{ $role = .role | default "group" }}{{ end }}
{{- list (include "jaxserve.name" .root) $role | compact | join "-" }}
{{- end }}

{{/* A file of settings; JSON keeps large numbers as they are */}}
{{- define "jaxserve.settings" -}}
{{- range $name, $value := . }}
{{ $name }}: {{ toJson $value }}
{{- end }}
{{- end }}

{{/* Flags of servers: where they listen, who may connect, how long they drain */}}
{{- define "jaxserve.serverArgs" -}}
- --host=0.0.0.0
- --drain_timeout={{ .Values.drainSeconds }}
{{- if .Values.apiKeysSecret }}
- --api_keys=/etc/jaxserve/keys/keys.yaml
{{- end }}
{{- if .Values.tlsSecret }}
- --tls_cert=/etc/jaxserve/tls/tls.crt
- --tls_key=/etc/jaxserve/tls/tls.key
{{- end }}
{{- if .Values.insecure }}
- --insecure
{{- end }}
{{- end }}

{{/* Fields of a pod's spec that all pods have */}}
{{- define "jaxserve.podFields" -}}
automountServiceAccountToken: false
# else the Service's address would be taken for a setting: JAXSERVE_PORT
enableServiceLinks: false
# the pause before SIGTERM, the drain, and the end
terminationGracePeriodSeconds: {{ add 5 .Values.drainSeconds 10 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # at each start it would make the cache writable by its group, and jaxserve refuses such a cache
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Fields of a container that all containers have */}}
{{- define "jaxserve.containerFields" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: settings, mountPath: /etc/jaxserve/settings, readOnly: true}
  - {name: cache, mountPath: /cache}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- if .Values.apiKeysSecret }}
  - {name: keys, mountPath: /etc/jaxserve/keys, readOnly: true}
  {{- end }}
  {{- if .Values.tlsSecret }}
  - {name: tls, mountPath: /etc/jaxserve/tls, readOnly: true}
  {{- end }}
{{- end }}

{{/* Volumes that all pods have, but for the cache */}}
{{- define "jaxserve.volumes" -}}
- {name: settings, configMap: {name: {{ include "jaxserve.name" . }}}}
- {name: tmp, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}}
{{- with .Values.apiKeysSecret }}
- {name: keys, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.tlsSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{/* Ports and probes of what serves clients */}}
{{- define "jaxserve.serving" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.tlsSecret "") -}}
ports:
  - {name: http, containerPort: 8000}
  - {name: grpc, containerPort: 8470}
startupProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: {{ mul 6 .Values.startupMinutes }}
livenessProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 3
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  # it may wait for a token
  timeoutSeconds: 6
lifecycle:
  # routes to a pod that ends are taken away meanwhile
  preStop: {sleep: {seconds: 5}}
{{- end }}
