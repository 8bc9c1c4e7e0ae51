"""`holdfast lint`: batch scripts and Kubernetes manifests that lose a run."""
