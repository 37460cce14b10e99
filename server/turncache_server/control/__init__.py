"""The control plane: small, versioned messages between engines and router, beside the data path."""
