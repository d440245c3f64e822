"""Fast products with quantized weights. Reference implementation: `dgemma.model.quantized_linear.product`."""
