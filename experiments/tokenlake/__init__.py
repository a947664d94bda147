"""The figures of TokenLake's evaluation, again: one file per figure.

`systems` simulates one pool of KV over lanes beside routers and pools of prefill and decode, all of
the same instances. `goodput` finds the rate that each can bear. docs/tokenlake.md says how, and
what comes out.
"""
