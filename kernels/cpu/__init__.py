"""Kernels for CPUs in C++, called through XLA's foreign functions: attention over pages and matrix
products, on the threads of XLA's own pool.

XLA's CPU compiler makes a loop of many small operations of flash attention, and its products of a
few rows stay far below the bandwidth of memory, those in bfloat16 by a factor of twenty. The same
C++ text is compiled once for each instruction set at installation (`build`); `library` loads the
best one that the processor has. Without a compiler, or a fitting instruction set, `xla` is used,
and the log and `jaxserve doctor` say why.

    src/vector.h     vectors by compiler extensions, exponentials, transposes, bf16 and fp8
    src/threads.h    loops over XLA's threads
    src/panels.h     products of many rows by panels of columns, copied or widened
    src/keys.h       arguments of attention, and a reader of pages in batches of keys
    src/prefill.h    rows of many tokens: lanes of a vector are queries
    src/decode.h     rows of one token: lanes are dims; long contexts in parts
    src/attention.cc the call of attention
    src/linear.cc    products, with few rows and with many, and of groups of rows
    src/quantised.cc products with weights that stay quantised
    src/write.cc     keys and values of tokens to their pages
"""
