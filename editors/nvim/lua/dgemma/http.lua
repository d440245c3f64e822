-- One request at a time, by curl. The editor does not wait, and a new request ends the one before.

local M = {}

local MAX_ANSWER_BYTES = 4 * 1024 * 1024

local running = nil

function M.is_running()
  return running ~= nil
end

function M.cancel()
  if running then
    vim.fn.jobstop(running)
    running = nil
  end
end

local function setting(name, value)
  return ('%s = "%s"'):format(name, (value:gsub('[\\"]', "\\%0")))
end

-- Text and key are no arguments, which every user of the machine can read, but a configuration on stdin.
local function configuration(options, path, body)
  local lines = {
    "silent",
    "show-error",
    "globoff",
    setting("proto", "=http,https"),
    setting("noproxy", "*"), -- a proxy is not where the user sends text to
    setting("max-time", tostring(options.timeout_s)),
    setting("max-filesize", tostring(MAX_ANSWER_BYTES)),
    setting("url", options.url:gsub("/+$", "") .. path),
    setting("header", "content-type: application/json"),
    setting("data-raw", vim.json.encode(body)),
    'write-out = "\\n%{http_code}"',
  }
  if options.key ~= "" then
    lines[#lines + 1] = setting("header", "authorization: Bearer " .. options.key)
  end
  return table.concat(lines, "\n") .. "\n"
end

local function read(options, keys, status, out, err)
  if status ~= 0 then
    return nil, ("no answer from %s: %s"):format(options.url, vim.trim(err))
  end
  local body, code = out:match("^(.*)\n(%d+)$")
  local is_json, answer = pcall(vim.json.decode, body or "")
  if is_json and type(answer) == "table" then
    local found = vim.tbl_get(answer, unpack(keys))
    if code == "200" and type(found) == "string" then
      return found
    end
    local reason = vim.tbl_get(answer, "error", "message")
    if type(reason) == "string" then
      return nil, reason
    end
  end
  return nil, ("%s answered with status %s, and not as dgemma does"):format(options.url, code or "unknown")
end

--- Send one request. `done(text)`, with what the answer has under `keys`, or `done(nil, reason)` is called
--- later, unless the request was ended before.
function M.post(options, path, body, keys, done)
  M.cancel()
  if vim.fn.executable("curl") == 0 then
    return done(nil, "there is no curl on the PATH; install it")
  end
  local out, err, job = "", "", nil
  job = vim.fn.jobstart({ "curl", "-q", "--config", "-" }, {
    stdout_buffered = true,
    stderr_buffered = true,
    on_stdout = function(_, lines)
      out = table.concat(lines, "\n")
    end,
    on_stderr = function(_, lines)
      err = table.concat(lines, "\n")
    end,
    on_exit = function(_, status)
      if running == job then
        running = nil
        done(read(options, keys, status, out, err))
      end
    end,
  })
  running = job
  vim.fn.chansend(job, configuration(options, path, body))
  vim.fn.chanclose(job, "stdin")
end

return M
