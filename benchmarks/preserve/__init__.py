"""PreServe's router as its paper has it, to compare the product's policies with."""
