"""Steps three equal parameters with DeepSpeedCPUAdam."""

MEASURES = "largest difference of three equal parameters after 60 steps of DeepSpeedCPUAdam"
TOLERANCE = 0.0
_STEPS = 60


def run() -> float:
    from zerofix.repro._adam import apart, optimizer_of, step
    from zerofix.repro._training import quiet

    with quiet():
        optimizer, parameters = optimizer_of(3)
        for index in range(_STEPS):
            step(optimizer, parameters, index)
    return max(apart(parameters[0], other) for other in parameters)
