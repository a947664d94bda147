from jaxserve.server import jaxserve_pb2 as _jaxserve_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlocksAsked(_message.Message):
    __slots__ = ("want", "batch", "alive", "taken", "final")
    WANT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    want: Want
    batch: Batch
    alive: Alive
    taken: Taken
    final: Alive
    def __init__(self, want: _Optional[_Union[Want, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., final: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class BlocksTold(_message.Message):
    __slots__ = ("ready", "sent")
    READY_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    sent: Sent
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("keys", "request_id", "time_left", "plane", "part")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    request_id: str
    time_left: float
    plane: str
    part: BlockPart
    def __init__(self, keys: _Optional[bytes] = ..., request_id: _Optional[str] = ..., time_left: _Optional[float] = ..., plane: _Optional[str] = ..., part: _Optional[_Union[BlockPart, _Mapping]] = ...) -> None: ...

class BlockPart(_message.Message):
    __slots__ = ("first_layer", "end_layer", "first_head", "end_head")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    END_HEAD_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    def __init__(self, first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., end_head: _Optional[int] = ...) -> None: ...

class PartPlace(_message.Message):
    __slots__ = ("part", "address")
    PART_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    part: BlockPart
    address: str
    def __init__(self, part: _Optional[_Union[BlockPart, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("blocks", "peer", "token", "size", "epoch")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    peer: str
    token: str
    size: int
    epoch: int
    def __init__(self, blocks: _Optional[int] = ..., peer: _Optional[str] = ..., token: _Optional[str] = ..., size: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("block_bytes", "planes", "part", "places")
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    block_bytes: int
    planes: _containers.RepeatedCompositeFieldContainer[PlaneOffer]
    part: BlockPart
    places: _containers.RepeatedCompositeFieldContainer[PartPlace]
    def __init__(self, block_bytes: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[PlaneOffer, _Mapping]]] = ..., part: _Optional[_Union[BlockPart, _Mapping]] = ..., places: _Optional[_Iterable[_Union[PartPlace, _Mapping]]] = ...) -> None: ...

class PlaneOffer(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("checksums", "last", "place", "seconds")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    place: str
    seconds: float
    def __init__(self, checksums: _Optional[_Iterable[int]] = ..., last: bool = ..., place: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("place",)
    PLACE_FIELD_NUMBER: _ClassVar[int]
    place: str
    def __init__(self, place: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("alive", "submit", "cancel", "stop", "question", "rejected")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    alive: Alive
    submit: Submit
    cancel: Cancel
    stop: Stop
    question: Question
    rejected: Rejected
    def __init__(self, alive: _Optional[_Union[Alive, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("welcome", "heartbeat", "step", "answer")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    heartbeat: Heartbeat
    step: Step
    answer: Answer
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("info", "max_message_bytes", "kv_addresses")
    INFO_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    info: str
    max_message_bytes: int
    kv_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, info: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., kv_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("number", "request_id", "prompt", "sampling", "age", "time_left", "ttft", "tpot", "class_name", "priority", "cache_salt", "bypass_prefix_cache", "guided", "kv_source", "cache_retention", "embed", "continuation", "job", "tenant", "adapter", "session", "probe", "tbt")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHE_RETENTION_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    TBT_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    prompt: bytes
    sampling: _jaxserve_pb2.SamplingParams
    age: float
    time_left: float
    ttft: float
    tpot: float
    class_name: str
    priority: int
    cache_salt: str
    bypass_prefix_cache: bool
    guided: _jaxserve_pb2.Guided
    kv_source: KvSource
    cache_retention: int
    embed: bool
    continuation: Continuation
    job: bool
    tenant: str
    adapter: str
    session: str
    probe: bool
    tbt: float
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., sampling: _Optional[_Union[_jaxserve_pb2.SamplingParams, _Mapping]] = ..., age: _Optional[float] = ..., time_left: _Optional[float] = ..., ttft: _Optional[float] = ..., tpot: _Optional[float] = ..., class_name: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., bypass_prefix_cache: bool = ..., guided: _Optional[_Union[_jaxserve_pb2.Guided, _Mapping]] = ..., kv_source: _Optional[_Union[KvSource, _Mapping]] = ..., cache_retention: _Optional[int] = ..., embed: bool = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., job: bool = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., session: _Optional[str] = ..., probe: bool = ..., tbt: _Optional[float] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("completions", "first_token_age", "weight_version", "last_token_age")
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_AGE_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[BegunCompletion]
    first_token_age: float
    weight_version: str
    last_token_age: float
    def __init__(self, completions: _Optional[_Iterable[_Union[BegunCompletion, _Mapping]]] = ..., first_token_age: _Optional[float] = ..., weight_version: _Optional[str] = ..., last_token_age: _Optional[float] = ...) -> None: ...

class BegunCompletion(_message.Message):
    __slots__ = ("index", "output")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    index: int
    output: bytes
    def __init__(self, index: _Optional[int] = ..., output: _Optional[bytes] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("address", "blocks", "request_id", "block_size")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    address: str
    blocks: int
    request_id: str
    block_size: int
    def __init__(self, address: _Optional[str] = ..., blocks: _Optional[int] = ..., request_id: _Optional[str] = ..., block_size: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("call", "number", "reason")
    CALL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    call: int
    number: int
    reason: str
    def __init__(self, call: _Optional[int] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("call", "number", "index")
    CALL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    call: int
    number: int
    index: int
    def __init__(self, call: _Optional[int] = ..., number: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("call", "load", "view_since", "flush_cache", "metrics", "kv", "adapter", "weights")
    CALL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VIEW_SINCE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    call: int
    load: bool
    view_since: int
    flush_cache: bool
    metrics: bool
    kv: KvQuestion
    adapter: AdapterQuestion
    weights: WeightsQuestion
    def __init__(self, call: _Optional[int] = ..., load: bool = ..., view_since: _Optional[int] = ..., flush_cache: bool = ..., metrics: bool = ..., kv: _Optional[_Union[KvQuestion, _Mapping]] = ..., adapter: _Optional[_Union[AdapterQuestion, _Mapping]] = ..., weights: _Optional[_Union[WeightsQuestion, _Mapping]] = ...) -> None: ...

class AdapterQuestion(_message.Message):
    __slots__ = ("kind", "name", "folder", "in_place")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    folder: str
    in_place: bool
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., folder: _Optional[str] = ..., in_place: bool = ...) -> None: ...

class WeightsQuestion(_message.Message):
    __slots__ = ("kind", "mode", "path", "version", "level", "parts")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    mode: str
    path: str
    version: str
    level: int
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., mode: _Optional[str] = ..., path: _Optional[str] = ..., version: _Optional[str] = ..., level: _Optional[int] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class KvQuestion(_message.Message):
    __slots__ = ("kind", "prompt", "salt", "seconds", "lease")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    prompt: bytes
    salt: str
    seconds: float
    lease: str
    def __init__(self, kind: _Optional[str] = ..., prompt: _Optional[bytes] = ..., salt: _Optional[str] = ..., seconds: _Optional[float] = ..., lease: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("call", "error", "done", "load", "view", "flushed_pages", "metrics", "kv", "adapter", "weights")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    call: int
    error: Error
    done: bool
    load: Load
    view: str
    flushed_pages: int
    metrics: bytes
    kv: str
    adapter: str
    weights: str
    def __init__(self, call: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., done: bool = ..., load: _Optional[_Union[Load, _Mapping]] = ..., view: _Optional[str] = ..., flushed_pages: _Optional[int] = ..., metrics: _Optional[bytes] = ..., kv: _Optional[str] = ..., adapter: _Optional[str] = ..., weights: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("field", "message", "status", "retry_after", "reason")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    field: str
    message: str
    status: str
    retry_after: float
    reason: str
    def __init__(self, field: _Optional[str] = ..., message: _Optional[str] = ..., status: _Optional[str] = ..., retry_after: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "queued_prefill_tokens", "queued_prefill_seconds", "pages_free", "pages_total", "pages_cached")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_prefill_tokens: int
    queued_prefill_seconds: float
    pages_free: int
    pages_total: int
    pages_cached: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., queued_prefill_seconds: _Optional[float] = ..., pages_free: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_cached: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("alive", "available", "overdue", "load", "other_requests", "kv_rates", "adapters", "weight_version", "weight_state", "cache_fingerprint")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    OTHER_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_RATES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_STATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    alive: bool
    available: bool
    overdue: float
    load: Load
    other_requests: int
    kv_rates: _containers.RepeatedCompositeFieldContainer[KvRate]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    weight_version: str
    weight_state: str
    cache_fingerprint: str
    def __init__(self, alive: bool = ..., available: bool = ..., overdue: _Optional[float] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., other_requests: _Optional[int] = ..., kv_rates: _Optional[_Iterable[_Union[KvRate, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., weight_version: _Optional[str] = ..., weight_state: _Optional[str] = ..., cache_fingerprint: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "folder", "identity", "number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    identity: str
    number: int
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., identity: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class KvRate(_message.Message):
    __slots__ = ("source", "plane", "bytes_per_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    source: str
    plane: str
    bytes_per_s: float
    def __init__(self, source: _Optional[str] = ..., plane: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("requests", "blocks", "weight_version")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestEvents]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockChange]
    weight_version: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestEvents, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockChange, _Mapping]]] = ..., weight_version: _Optional[str] = ...) -> None: ...

class BlockChange(_message.Message):
    __slots__ = ("medium", "stored", "removed", "cleared")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    medium: str
    stored: StoredBlocks
    removed: BlockKeys
    cleared: bool
    def __init__(self, medium: _Optional[str] = ..., stored: _Optional[_Union[StoredBlocks, _Mapping]] = ..., removed: _Optional[_Union[BlockKeys, _Mapping]] = ..., cleared: bool = ...) -> None: ...

class StoredBlocks(_message.Message):
    __slots__ = ("keys", "parent", "salt")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    salt: str
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., salt: _Optional[str] = ...) -> None: ...

class BlockKeys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RequestEvents(_message.Message):
    __slots__ = ("number", "events", "refused")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    refused: Error
    def __init__(self, number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., refused: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("accepted", "progress", "token", "finished", "error")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    accepted: _jaxserve_pb2.Accepted
    progress: _jaxserve_pb2.Progress
    token: _jaxserve_pb2.Token
    finished: _jaxserve_pb2.Finished
    error: Error
    def __init__(self, accepted: _Optional[_Union[_jaxserve_pb2.Accepted, _Mapping]] = ..., progress: _Optional[_Union[_jaxserve_pb2.Progress, _Mapping]] = ..., token: _Optional[_Union[_jaxserve_pb2.Token, _Mapping]] = ..., finished: _Optional[_Union[_jaxserve_pb2.Finished, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...
