"""What a step is called with: its signature, its containers, the values that it does not read, and static buffers."""
