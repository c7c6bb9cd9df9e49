"""Rows in, rows out: kernels are told rows and never positions (the chapter's section 15.4).

    reference    one row and one head at a time
    vectorized   PyTorch's copies, any device
    triton_rows  one launch, any strides, on a GPU

All have the same names and signatures and leave the same bytes.
"""
