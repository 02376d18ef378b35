"""Loading of models: files to tensors, choice of device and dtype."""
