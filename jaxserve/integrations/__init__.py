"""jaxserve as a part of other people's systems: each module imports one of them, which has to be
installed beside jaxserve.

    dynamo           a backend of NVIDIA Dynamo
    dynamo_requests  Dynamo's requests as ours, our events as its chunks
    tunix            a rollout engine of Tunix
    tunix_weights    parameters of Tunix's models by their Hugging Face names; needs no Tunix
"""
