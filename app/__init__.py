"""The web side of the service: HTTP in `api`, operations in `services`, code shared with the worker in `shared`."""
