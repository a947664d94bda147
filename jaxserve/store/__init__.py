"""Blocks of KV outside the devices: in host memory, on a local disk, in a Mooncake Store.

Everything here is bytes under keys; the cache decides which blocks come. A store may lose a block
at any time and never gives wrong bytes: each block has a checksum over its key and its bytes, which
is made when the block comes and compared when it leaves. What does not match is a miss, and so is
every error of a device or a network.

    tiered        TieredBlocks: all tiers together, as a replica sees them
    host_tier     HostTier: blocks in host memory, and those on their way
    host_index    HostIndex: which block is in which slot, and which leaves first
    backing       BackingTiers: disk and shared store behind host memory
    prefetch      Prefetcher: brings blocks from there for prompts that wait
    parts         PartIndex: which blocks the processes of a replica have, each its part
    block_part    BlockPart, PartBytes: some layers and heads of a block, and their bytes
    tally         Tally, Bandwidth: counts and measured speeds
    checksum      crc32c of a block under its key
    host_memory   HostBlocks: numbered slots of one allocation
    disk          DiskBlocks: a file of records, overwritten in the order of writing
    ring          Ring: which block is in which record, and which is overwritten next
    block_file    BlockFile: records read and written beside the page cache
    record        RecordHeader: what is written before each block
    shared        SharedTier: a store of many hosts, behind host memory
    mooncake      MooncakeBlocks: a client of a Mooncake Store, under deadlines
    call_threads  CallThreads: threads and staging memory for calls that may hang
"""
