"""Object storage for payloads: locations, reading and writing of objects, and the format of an object."""
