"""turncache's server side: retention, the engine connector, control plane, router, launcher."""
