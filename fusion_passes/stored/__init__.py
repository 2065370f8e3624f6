"""The backward that is compiled with a forward: stores gradients in the memory of a reducer."""
