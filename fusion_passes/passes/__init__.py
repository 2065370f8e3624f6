"""One file a pass. A pass is a frozen dataclass whose fields are its options; it is called with a
graph and returns True exactly when it changed it. Passes never import each other."""
