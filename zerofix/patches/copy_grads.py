"""ZeRO-1/2 with optimizer offload loses gradients of earlier backwards."""

from zerofix.fix import Edit, Fix, Target

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"

FIX = Fix(
    name="copy_grads",
    title="optimizer offload keeps the gradient of every backward",
    symptom=(
        "ZeRO-1/2 with offload_optimizer trains on part of the batch: with "
        "gradient_accumulation_steps=1 and several backwards a step "
        "(set_gradient_accumulation_boundary) only the last one counts, with "
        "gradient_accumulation_steps>2 the micro-batches between the first and the last are "
        "dropped."
    ),
    cause=(
        "The partial sum that ZeRO-2 keeps in CPU memory between backwards is used only when "
        "gradient_accumulation_steps>1, and only the first micro-batch is ever written to it."
    ),
    upstream=("#7981", "#7967"),
    introduced=None,
    fixed="0.19.0",
    targets=(
        # A partial sum is needed when more backwards follow in this step, or went before.
        # ZeRO-1 comes here at the boundary only, with the whole sum in the gradient.
        Target(
            f"{_OPTIMIZER}.copy_grads_in_partition",
            Edit(
                find="self.gradient_accumulation_steps > 1",
                put=(
                    "not self.is_gradient_accumulation_boundary"
                    " or self.get_param_id(param) in getattr(self, 'partial_sums_in_cpu', ())"
                ),
            ),
        ),
        # A sum that has been used is no part of the next one. At the boundary the whole sum goes
        # on to the fp32 buffer: there is nothing to keep.
        Target(
            f"{_OPTIMIZER}.async_accumulate_grad_in_cpu_via_gpu",
            Edit(
                find="""
if self.micro_step_id > 0:
    accumulate_gradients()
else:
    copy_gradients_to_cpu()
""",
                put="""
partial_sums = self.__dict__.setdefault("partial_sums_in_cpu", set())
if param_id in partial_sums:
    accumulate_gradients()
    partial_sums.remove(param_id)
if not self.is_gradient_accumulation_boundary:
    copy_gradients_to_cpu()
    partial_sums.add(param_id)
""",
            ),
        ),
        # Runs at the end of a step, also of one that is skipped for an overflow: a parameter that
        # has no gradient at the boundary must not meet its sum in the next step.
        Target(
            f"{_OPTIMIZER}.reset_cpu_buffers",
            Edit(
                find="self.norm_for_param_grads = {}",
                put="self.norm_for_param_grads = {}\nself.partial_sums_in_cpu = set()",
            ),
        ),
    ),
)
