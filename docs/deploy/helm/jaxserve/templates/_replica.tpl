{{/* A replica's pod. Takes root, role ('' for both), serves (whether clients come to it). */}}
{{- define "jaxserve.replicaPod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "jaxserve.selector" $root | nindent 4 }}
    app.kubernetes.io/component: replica
    jaxserve/role: {{ .role | default "mixed" }}
    {{- if $values.inferencePool.enabled }}
    # whose names our metrics have: --metrics_aliases
    llm-d.ai/engine-type: vllm
    # both legs of a request
    llm-d.ai/role: decode
    {{- end }}
  annotations:
    # new settings mean new pods
    checksum/settings: {{ toJson $values.settings | sha256sum }}
spec:
  {{- include "jaxserve.podFields" $root | nindent 2 }}
  containers:
    - name: jaxserve
      {{- include "jaxserve.containerFields" $root | nindent 6 }}
      args:
        {{- if gt (int $values.hosts) 1 }}
        - launch
        - "--"
        {{- end }}
        - serve
        - --config=/etc/jaxserve/settings/server.yaml
        {{- include "jaxserve.serverArgs" $root | nindent 8 }}
        {{- if $values.conductor.enabled }}
        - --replica_port=8480
        {{- if $values.tlsSecret }}
        - --cluster_ca=/etc/jaxserve/tls/ca.crt
        {{- end }}
        {{- end }}
        {{- with .role }}
        - --role={{ . }}
        {{- if not (hasKey $values.settings "host_cache_gib") }}
        - --host_cache_gib=1
        {{- end }}
        {{- end }}
        {{- if $values.inferencePool.enabled }}
        - --metrics_aliases=vllm
        - --kv_events=tcp://0.0.0.0:5557
        - --kv_events_replay=tcp://0.0.0.0:5558
        - --kv_events_address=$(POD_IP):8000
        {{- end }}
      env:
        - {name: JAXSERVE_CACHE, value: /cache/jaxserve}
        - {name: HF_HOME, value: /cache/huggingface}
        {{- if $values.conductor.enabled }}
        - name: JAXSERVE_CLUSTER_SECRET
          valueFrom: {secretKeyRef: {name: {{ $values.groupSecret }}, key: secret}}
        {{- end }}
        {{- if gt (int $values.hosts) 1 }}
        - name: JAXSERVE_GROUP_SECRET
          valueFrom: {secretKeyRef: {name: {{ $values.groupSecret }}, key: secret}}
        {{- end }}
        {{- if $values.inferencePool.enabled }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if .serves }}
      {{- include "jaxserve.serving" $root | nindent 6 }}
      {{- else }}
      lifecycle:
        # all pods of a replica are told to end at once; the leader's requests need the others
        preStop: {sleep: {seconds: {{ add 5 $values.drainSeconds }}}}
      {{- end }}
      resources:
        {{- $limits := deepCopy ($values.resources.limits | default dict) }}
        {{- with $values.gpus }}{{ $_ := set $limits "nvidia.com/gpu" (toString .) }}{{ end }}
        limits: {{ toYaml $limits | nindent 10 }}
        requests: {{ toYaml ($values.resources.requests | default dict) | nindent 10 }}
  volumes: {{ include "jaxserve.volumes" $root | nindent 4 }}
{{- end }}

{{/* The claim of a replica's pod for its cache */}}
{{- define "jaxserve.cacheClaim" -}}
- metadata:
    name: cache
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .Values.cache.storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .Values.cache.size }}}}
{{- end }}
