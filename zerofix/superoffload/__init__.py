"""SuperOffload without its defects: ZeRO-3 offload whose CPU steps run ahead in a worker process.

``methods`` has what the fixes put into DeepSpeed's classes, ``speculation`` decides which steps
are begun during the backward and which of them count, ``worker`` is the process that computes
them, ``client`` its end in the training process, ``memory`` what the two share.
"""
