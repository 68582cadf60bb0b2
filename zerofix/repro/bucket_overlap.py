"""Counts how often backward waits under ZeRO-2 with overlap_comm."""

MEASURES = "waits of backward for the reduction of the bucket just filled, ZeRO-2 with overlap_comm"
TOLERANCE = 0.0


def run() -> float:
    from zerofix.repro import _streams

    return _streams.run(
        {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 300}, producers=1
    ).waits
