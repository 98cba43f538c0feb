"""Object storage for payloads: where it is, reading and writing objects, and what an object holds."""
