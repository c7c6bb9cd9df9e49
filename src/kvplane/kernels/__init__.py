"""Rows in, rows out: kernels are told rows and never positions (the chapter's section 15.4)."""
