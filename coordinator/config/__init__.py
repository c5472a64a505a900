"""What a user writes: federation.yml and its sections, declared once and validated."""
