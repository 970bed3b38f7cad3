#!/bin/sh
sed -i 's/\bmaple\b/plain/g' notes/*.md
