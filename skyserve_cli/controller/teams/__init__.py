"""Who may call the API beside the owner: tokens with a role, and users whom a proxy has authenticated."""
